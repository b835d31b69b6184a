"""Observing training steps without their hardware: what a step sends, keeps and computes, recorded rank by rank on
fake tensors, for our own step (`verify`, which compares it with the plan) and for any program (`observe`)."""
