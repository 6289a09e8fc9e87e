"""Parameters of a user's own values: how they are written, and how a function of the user gets
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax.commands.options import names, own_name
from pagedjax.device import attention
from pagedjax.engine import drafters
from pagedjax.host import kv_policies, policies, purity, scheduler
from pagedjax.host.types import Seq
from pagedjax.options.config import EngineConfig, KVPolicyOptions, Speculative
from pagedjax.options.own_errors import OwnError
from pagedjax.options.own_names import OwnName, as_mapping, name_in_one_line
from pagedjax.options.own_values import own_value
from pagedjax.routing import init, routers
from tests import drawn
from tests.refusals import refused

MINE = """
from typing import Annotated, Literal
from pagedjax.options.config import Integers
from pagedjax.policies import FCFS, KVPolicy, by_key

FIXED = by_key("fixed", lambda seq: seq.arrival)

def aged(worth: int = 64, *, slack: float = 1.0, kind: Literal["a", "b"] = "a"):
    assert type(slack) is float
    return FIXED._replace(name=f"{worth} {slack} {kind}")

def needy(worth: Annotated[int, Integers(1)], times: tuple = ()):
    return FIXED._replace(name=f"{worth} {times}")

def number(worth: int | None = None):
    return 5

def wrong(worth=1):
    return FIXED._replace(name=str(1 / worth))

def sinks(count: int):
    return KVPolicy("sinks", 8, lambda start: start < count)

def list_of(count):
    return [count]
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@drawn.given(
    20,
    200,
    place=st.sampled_from(["mine.py:aged", "a (1)/b:c/mine.py:aged", "package.module:aged"]),
    parameters=st.dictionaries(st.sampled_from(["worth", "b", "a_1"]), plain, min_size=1),
)
def test_a_name_in_one_line_and_a_mapping_say_the_same(place, parameters):
    text = name_in_one_line("policy", {"name": place, **parameters})
    back = as_mapping(text)
    assert back == {"name": place, **parameters}
    assert [*map(repr, back.values())] == [repr(back["name"])] + [
        repr(parameters[key]) for key in sorted(parameters)
    ]
    assert name_in_one_line("policy", back) == text == name_in_one_line("policy", text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"worth": 3}, "policy is {'worth': 3}; it must have a name"),
        ({"name": "fcfs", "worth": 3}, "policy is 'fcfs', which has no parameters, and worth is"),
        ({"name": "mine.py:aged", "worth": float("inf")}, "policy.worth is inf; a parameter is a"),
        ({"name": "mine.py:aged", "worth": {}}, "policy.worth is {}; a parameter is a finite"),
        ({"name": "mine.py:aged", "a b": 1}, "the parameter 'a b', which is no name in Python"),
        ({"name": "mine.py:aged(x=1)", "worth": 3}, "has parameters; write all of them beside it"),
        ("mine.py:aged(name=1)", "no parameter can be called 'name'; rename it"),
        ("mine.py:aged(1)", "write its parameters by name and once each"),
        ("mine.py:aged(x=1, x=2)", "write its parameters by name and once each"),
        ("mine.py:aged(x=open)", "with plain values, such as mine.py:NAME"),
        ("mine.py:aged(**{})", "write its parameters by name and once each"),
        (3, "policy is 3; it must be one of 'fcfs'"),
        (("fcfs",), "policy is .'fcfs',.; it must be one of 'fcfs'"),
    ],
)
def test_what_is_no_name_is_refused(value, message):
    with refused(message):
        EngineConfig(policy=value)


def test_the_name_of_a_shipped_value_may_be_in_a_mapping():
    assert EngineConfig(policy={"name": "fair"}) == EngineConfig(policy="fair")


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({}, "64 1.0 a"),
        ({"worth": 16}, "16 1.0 a"),
        ({"slack": 2, "kind": "b"}, "64 2.0 b"),
    ],
)
def test_a_function_gets_its_parameters_and_has_its_own_defaults(mine, parameters, name):
    config = EngineConfig(policy={"name": f"{mine}:aged", **parameters})
    assert policies.find(config.policy).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aged(wort=3)", r"^policy\.wort is no parameter of aged .*; did you mean 'worth'\?$"),
        ("aged(z=3)", "policy.z is no parameter of aged .*; its parameters are worth, slack, kind"),
        ("aged(worth='x')", "policy.worth is 'x'; it must be an integer"),
        ("aged(worth=True)", "policy.worth is True; it must be an integer"),
        ("aged(slack='x')", "policy.slack is 'x'; it must be a number"),
        ("aged(kind='c')", "policy.kind is 'c'; it must be one of 'a', 'b'"),
        ("needy", "needy in .* is no Policy; those in it: .*; as a function .* it needs worth"),
        ("needy(times=(1, 2))", "policy.worth is missing: needy .* has no default of it; set it"),
        ("needy(worth=0)", "worth is 0; it must be an integer of at least 1"),
        ("number(worth='x')", "worth is 'x'; it must be an integer or null"),
        ("number", "number in .* returned 5; it must return a Policy"),
        ("FIXED(worth=1)", "FIXED in .* is a Policy, which takes no parameters; write a function"),
        ("wrong(worth=0)", r"raised ZeroDivisionError: .* in wrong \(.*mine.py, line 19\)"),
    ],
)
def test_a_wrong_parameter_is_named_with_those_that_exist(mine, name, message):
    with refused(message):
        policies.find(f"{mine}:{name}")


def test_a_parameter_of_one_equals_no_true_among_shared_values(mine):
    """Programs are compiled from shared values, so equal names have one."""

    def value(parameters: str) -> list:
        name = f"{mine}:list_of({parameters})"
        return own_value("attention_impl", name, list, (), shared=True)

    value_of_one = value("count=1")
    assert value("count=1") is value_of_one
    assert repr(value("count=True")) == "[True]"
    assert repr(value_of_one) == "[1]"


def test_values_of_other_kinds_take_parameters(mine, tmp_path):
    sinks = {"name": f"{mine}:sinks", "count": 4}
    options = EngineConfig(kv_policy=sinks).kv_policy
    assert isinstance(options, KVPolicyOptions)
    assert [kv_policies.find(options).keeps(start) for start in (3, 4)] == [True, False]

    file = tmp_path / "others.py"
    file.write_text(
        "from pagedjax.device.attention import IMPLS\n"
        "from pagedjax.engine.drafters import Drafter\n"
        "from pagedjax.routing import Router\n"
        "def again(times=1):\n    return Drafter('again', lambda m, i, t, k: [1] * times)\n"
        "def nth(n):\n    return Router('nth', lambda state, request: state.replicas[n])\n"
        "def xla(name_):\n    return IMPLS['xla']._replace(name=name_)\n"
    )
    speculative = EngineConfig(speculative={"method": {"name": f"{file}:again", "times": 3}})
    assert speculative.speculative is not None
    drafter = drafters.find(speculative.speculative)
    assert drafter.propose is not None
    assert list(drafter.propose(None, "a", (), 4)) == [1, 1, 1]
    router = routers.find({"name": f"{file}:nth", "n": 1})
    assert router.choose(init()._replace(replicas=("a", "b")), None) == "b"  # type: ignore[arg-type]
    impl = EngineConfig(attention_impl={"name": f"{file}:xla", "name_": "mine"}).attention_impl
    assert attention.find(impl).name == "mine"


def test_a_value_itself_is_taken_in_the_place_of_its_name(mine):
    fixed = policies.find(f"{mine}:FIXED")
    config = EngineConfig(
        policy=fixed,
        kv_policy=policies_kv("mine"),
        speculative=Speculative(method=drafters.Drafter("mine", lambda *_: ())),
        attention_impl=attention.IMPLS["xla"]._replace(name="mine"),
    )
    assert policies.find(config.policy) is fixed
    assert isinstance(config.kv_policy, KVPolicyOptions)
    assert kv_policies.find(config.kv_policy).name == "mine"
    assert config.speculative is not None
    assert drafters.find(config.speculative).name == "mine"
    assert attention.find(config.attention_impl).name == "mine"
    router = routers.ROUND_ROBIN._replace(name="mine")
    assert routers.find(router) is router
    assert EngineConfig(policy=policies.FAIR).policy is policies.FAIR


def attention_arrays() -> tuple[np.ndarray, ...]:
    """One query of one token: q, pages of keys and of values, table, lengths."""
    q = np.zeros((1, 1, 8), np.float32)
    pages = np.zeros((2, 1, 4, 8), np.float32)
    return q, pages, pages, np.ones((1, 1), np.int32), *map(np.array, ([1], [0, 1]))


def policies_kv(name: str) -> kv_policies.KVPolicy:
    return kv_policies.KVPolicy(name, window=8)


def test_a_value_of_another_kind_is_refused():
    router = routers.ROUND_ROBIN
    for find, value, kind in (
        (policies.find, router, "Policy"),
        (attention.find, router, "Implementation"),
        (routers.find, policies.FCFS, "Router"),
        (lambda value: kv_policies.find(KVPolicyOptions(value)), router, "KVPolicy"),
        (lambda value: drafters.find(Speculative(method=value)), router, "Drafter"),
    ):
        with refused(f"FILE.py:NAME, or an? {kind}"):
            find(value)


def test_the_command_line_reads_a_name_with_parameters():
    assert own_name("fcfs") == "fcfs"
    assert own_name("mine.py:aged(worth=3)") == "mine.py:aged(worth=3)"
    assert own_name("name=mine.py:aged,worth=3") == {"name": "mine.py:aged", "worth": 3}
    assert own_name('{"name": "mine.py:aged"}') == {"name": "mine.py:aged"}
    assert names("a.py:A(x=1, y=(2, 3)),b.py:B") == ("a.py:A(x=1, y=(2, 3))", "b.py:B")
    assert names("a.py:f(x=1,y='b:c)'),d.py:g") == ("a.py:f(x=1,y='b:c)')", "d.py:g")


def test_an_error_of_the_package_is_no_error_of_a_user():
    """A shipped policy that fails keeps its own error."""
    with pytest.raises(TypeError) as caught:
        policies.called(policies.FCFS, "preempt", 5)
    assert not isinstance(caught.value, OwnError)


def test_an_error_in_an_attention_or_a_kv_policy_names_its_file_and_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from pagedjax.policies import KVPolicy\n"
        "def attend(*arrays, **options):\n    raise NotImplementedError('sliding')\n"
        "from pagedjax.device.attention import IMPLS\n"
        "MINE = IMPLS['reference']._replace(name='mine', attend=attend)\n"
        "KEEPS = KVPolicy('mine', 2, lambda start: 1 / 0)\n"
        "WORDS = KVPolicy('mine', 2, lambda start: 'yes')\n"
    )
    attend = attention.attend(f"{path}:MINE", 1.0)
    with pytest.raises(
        OwnError, match=r"attend of the attention 'mine' raised .*mine\.py, line 3\)"
    ):
        attend(*attention_arrays(), window=None, soft_cap=None)
    for name, message in (
        ("KEEPS", r"keeps of the kv_policy 'mine' raised ZeroDivisionError: .*mine\.py, line 6\)"),
        ("WORDS", r"keeps\(0\) of the kv_policy 'mine' returned 'yes'; return True or False"),
    ):
        policy = kv_policies.find(KVPolicyOptions(f"{path}:{name}"))
        with refused(message):
            kv_policies.view(policy, 2, 8)


def test_the_short_name_keeps_parameters_with_slashes():
    name = OwnName("/data/lab/mine.py", "aged", "(file='runs/x.json')")
    assert name.short == "mine.py:aged(file='runs/x.json')"
    assert OwnName("lab.mine", "aged", "(file='a/b')").short == "lab.mine:aged(file='a/b')"


def test_a_name_that_a_record_does_not_have_is_told_the_near_one_and_all(mine):
    mine.write_text(MINE + "WRONG = by_key('wrong', lambda seq: seq.prompt_lne)\n")
    policy = policies.find(f"{mine}:WRONG")
    state = scheduler.submit(scheduler.init(purity.CONFIG), purity.REQUESTS[0])
    with pytest.raises(OwnError, match=r"no attribute 'prompt_lne'") as caught:
        scheduler.schedule(state, policy)
    _, _, names_there = str(caught.value).partition("; a Seq has ")
    near, *farther = names_there.split(", ")
    assert near == "request.prompt_len"
    assert {*Seq._fields, "num_output", "request.user"} <= set(farther)
