"""The values that describe a cluster: who is in it, how it is configured, what happened to it.

They are immutable and shared by the packages that plan (`tensorforge.data`), decide (`tensorforge.elastic`)
and train (`tensorforge.train`). Users import them from `tensorforge.elastic`. An `ElasticTrainingConfig`
(`elastic_config`) says how a run behaves. Each `WorkerId` (`workers`) that joins becomes part of the next
`ClusterTopology` (`topology`). The change from one topology to the next is a `RescalingEvent` (`rescaling`),
and a newcomer starts from a `GlobalTrainingState` (`global_state`). Each optimizer step that all members
applied is a `CommittedStep` (`committed_step`).
"""
