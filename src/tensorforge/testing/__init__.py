"""Tools for tests of the project and of its users; no other package imports them.

`simulated_cluster` drives the coordinator's state machine without processes. `process_cluster` starts a real
coordinator and workers without tensors (`minimal_worker`); `training_cluster` starts workers that train, and
`storms` disturbs them. `proxy` and `network_namespace` cut connections. `blob_conformance` and
`crew_conformance` have the tests that every store and every crew passes. The other modules provide stores.
"""
