"""Compression methods as data. No other room names a method.

registry     the methods, and what a method is made of
options      how a request such as "name:key=value+name" is spelled; what a method
             decided (Decision)
composition  from a request to a plan and a basis
variants     the plans of one request that a search tries
evidence     why a plan's bases should be believed, for the report

A method is one file with a SUMMARY and the functions that registry.py describes. Methods
that decide different things compose, in any order. docs/extending/method.md adds one.
"""
