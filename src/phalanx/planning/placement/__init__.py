"""Where each rank of a job goes: the GPUs of a mesh, what a placement costs, and the best one on given GPUs."""
