"""Parameter servers: processes that hold a model's parameters and apply the gradients that workers push.

worker ── client.py ── transport.py ~~~ transport.py ── server.py ── shard.py
          connections.py: reconnects    frame_format.py  event loop   pure state machine: order, then apply
          session.py: unanswered requests                            ├─ dense_table.py, sparse_table.py: parameters
                                                                     ├─ pending_steps.py, reduce.py: gradients
                                                                     └─ step_coordinator.py: assigns steps (shard 0)
"""
