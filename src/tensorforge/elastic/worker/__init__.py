"""A worker's side of the cluster.

`connection` keeps a stream to the coordinator open. `inbox` applies the coordinator's messages to
`worker_state`, `resend_buffer` repeats the worker's messages after a reconnection. `member` joins these to
a membership; `worker` adds training state and data, and is what training code uses.
"""
