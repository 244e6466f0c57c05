#!/bin/sh
# The namespace, with finished turns kept for 90 days; Temporal's default is three.
set -eu

if temporal operator namespace describe -n default >/dev/null 2>&1; then
  temporal operator namespace update -n default --retention 90d
else
  temporal operator namespace create -n default --retention 90d
fi
