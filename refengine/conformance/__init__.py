"""Judging engines: the same history played on several sides, and every byte of it compared. Floor 7."""
