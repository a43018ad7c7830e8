"""The vocabulary of a cluster: who is in it, how it is configured, what happened to it.

Plain immutable values, shared by the packages that plan (`tensorforge.data`), decide
(`tensorforge.elastic`) and train (`tensorforge.train`). Users import them from `tensorforge.elastic`.

    config.py     ElasticTrainingConfig and the enums it is made of
    worker.py     who a worker is and what it is doing
    topology.py   the members of one generation
    state.py      where training stands
    events.py     a change from one topology to the next
    committed_step.py   one optimizer step that all members applied
"""
