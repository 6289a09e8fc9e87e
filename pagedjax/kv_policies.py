"""KV policies, under their public name: what `pagedjax.host.kv_policies` has for a policy of one's own."""

from pagedjax.host.kv_policies import FULL, KVPolicy, View, streaming, view

__all__ = ["FULL", "KVPolicy", "View", "streaming", "view"]
