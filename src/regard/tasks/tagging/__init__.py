"""Tagging: a tag for every word of a sentence, by chains (HMM, MEMM, CRF) over features or over an encoder's states."""
