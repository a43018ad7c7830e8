"""The members of one generation: how they meet, connect, agree on one state, and heal newcomers.

`membership` and `elastic_membership` know who takes part, `session` follows the generations, `fabric`
names the collective operations, `gloo_fabric` has them for the CPU and `staged_fabric` for devices, through
`host_staging`. `generation_group` joins the fabrics of one generation, `agreement` and `healing` bring all
members to one state.
"""
