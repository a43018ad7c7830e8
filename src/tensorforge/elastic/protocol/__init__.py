"""What workers, clients and the coordinator send to each other, and who may send it.

`messages` between workers and coordinator, `commands` and `cluster_view` between clients and coordinator,
made of `reasons` and `rescale_record`; `access` and `token_files` protect them. Nothing here imports either
side.
"""
