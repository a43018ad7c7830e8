"""A worker's side of the cluster: its connection, its membership, and what training code talks to."""
