"""The workflows: a driver for each session and a child workflow for each turn. They decide; activities act."""
