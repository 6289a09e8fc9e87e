"""Replicas of an engine on Ray Serve, behind one address. It needs the extra `ray`.

`docs/design/replicas.md` explains it.

options.py         the options, checked before anything starts
application.py     `app`: the application of Ray Serve, for YAML files and for
                   `serve run pagedjax.server.ray:app`
ingress.py         the one address: key, router, passing answers on, replicas that are lost
prompts.py         what a router must know of a request, from its body
request_router.py  Ray Serve's request router around a pure one of pagedjax.routing
link.py            what the ingress and the request router know of each other
replica.py         one engine and its application, in a process of Ray's
pages.py           the metrics of all replicas as one page
command.py         `pagedjax serve --replicas N`
"""

from pagedjax.server.ray.application import app

__all__ = ["app"]
