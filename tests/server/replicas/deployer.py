"""A command: deploy replicas of a model, and deploy them with other options at each line of
standard input.

python -m tests.server.replicas.deployer FOLDER FIRST_MODEL SECOND_MODEL ...

The replicas of the second model have blocks of 8 tokens, those of the third blocks of 4, and so on.
"""

from __future__ import annotations

import argparse
import sys

from ray import serve

from pagedjax.server.ray import command
from pagedjax.server.ray.application import application
from pagedjax.server.ray.options import ClusterOptions


def main() -> None:
    models = sys.argv[1:]
    versions = [
        ClusterOptions(
            model=model,
            replicas=2,
            engine={
                "max_num_seqs": 4,
                "max_num_batched_tokens": 64,
                "token_buckets": (8, 64),
                "num_blocks": 256,
                "block_size": 16 >> number,
                "batch_invariant": True,
            },
            server={"name": "tiny"},
            resources={"num_cpus": 0.3},
            drain_seconds=60,
        )
        for number, model in enumerate(models)
    ]
    command.start_ray(None, "WARNING")
    words = argparse.Namespace(ray_address=None, host="127.0.0.1", port=0, log_level="warning")
    host, port = command.address(words)
    url = command.deploy(versions[0], host, port, words)
    print(f"serving tiny at {url}/v1", flush=True)
    for options in versions[1:]:
        if not sys.stdin.readline():
            break
        serve.run(application(options), name=command.NAME, route_prefix="/")
        print("deployed", flush=True)
    sys.stdin.readline()
    serve.shutdown()


if __name__ == "__main__":
    main()
