"""Steps whose sequences have unequal lengths: how they are drawn, packed and dealt, and what they take."""
