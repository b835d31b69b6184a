"""Steps with sequences of unequal lengths: how these are drawn, packed and dealt to ranks, and their step times."""
