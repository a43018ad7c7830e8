"""The members of one generation: how they meet, connect, agree on one state, and heal newcomers.

`membership` and `elastic_membership` know who takes part, `session` follows the generations, `gloo_group`
has the collective operations, `agreement` and `healing` bring all members to one state.
"""
