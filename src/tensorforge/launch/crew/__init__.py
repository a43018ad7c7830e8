"""Crews: who starts the workers' processes, on which machines, and tells what becomes of them.

`crew` has the protocol and its events. `local_crew` starts processes of this machine.
`tensorforge.testing.crew_conformance` has the tests that every crew passes.
"""
