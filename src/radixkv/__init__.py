"""RadixKV: the KV-cache memory layer of an LLM serving engine.

Three rooms, imports point down only: `radixkv.scheduling` (requests, queues, the batch
scheduler, runners) talks to `radixkv.mem_cache` (prefix caches over a paged pool),
which talks to `radixkv.kernels` (the device operations).
"""

__version__ = "0.1.0"
