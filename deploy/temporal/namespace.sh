#!/bin/sh
# The namespace, with finished turns kept for 90 days (Temporal's default is three), and its search attributes.
set -eu

if temporal operator namespace describe -n default >/dev/null 2>&1; then
  temporal operator namespace update -n default --retention 90d
else
  temporal operator namespace create -n default --retention 90d
fi

# What Temporal's UI can search sessions by. Repeating it changes nothing.
temporal operator search-attribute create -n default --name PerdureAgent --type Keyword --name PerdureRoot --type Keyword \
  --name PerdureParent --type Keyword
