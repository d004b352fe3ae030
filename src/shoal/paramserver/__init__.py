"""Parameter servers: processes that hold a model's parameters and apply what workers push. Knows no job and no plan.

worker ── client.py ── transport.py ~~~ transport.py ── server.py ── shard.py
            links.py: lost,          frames.py: bytes     the loop      order, then apply: pure
            and made again                                              ├─ dense.py, sparse.py: what it holds
            session.py: what is                                         ├─ steps.py, merge.py: gradients of one step
            still unanswered                                            └─ pace.py: who may do which step (shard 0)
"""
