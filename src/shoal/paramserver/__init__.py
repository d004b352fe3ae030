"""Parameter servers: processes that hold a model's parameters and apply what workers push. Knows no job and no plan.

worker ── client.py ── transport.py ~~~ transport.py ── server.py ── shard.py
            session.py: what is      frames.py: bytes     the loop      order, then apply: pure
            still unanswered                                            ├─ dense.py, sparse.py: what it holds
                                                                        ├─ merge.py: gradients of one step
                                                                        └─ pace.py: who may do which step (shard 0)
"""
