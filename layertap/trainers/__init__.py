"""Stored hidden states in the terms of trainers.

`speculators`, `specforge` and `modelopt` read a root directly, from within the trainer's own process, and
import that trainer: import them there. `export` writes the files of these and of Automodel and DeepSpec, and
imports none. What each trainer wants, and what was checked with which release, is in docs/trainers.md.
"""
