"""Compression methods as data. No other room names a method.

method       what a method is made of, and what it answers (Decision)
options      how a method's options are declared and read
registry     the methods: every file here that has a METHOD
compression  what was asked for, parsed once: "name:option=value+name"
composition  from a compression to a plan and a basis
variants     the plans of one compression that a search tries
evidence     why a plan's bases should be believed, for the report

A method is one file with a SUMMARY and the functions that registry.py describes. Methods
that decide different things compose, in any order. docs/extending/method.md adds one.
"""
