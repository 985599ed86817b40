"""Recall: does a model answer from its conversation? Dialogues with known answers, and the measure over them. Floor 7."""
