#!/bin/sh
# Temporal's databases: made when they are missing, upgraded when they are old. SQL_* say where.
set -eu

upgrade() {
  temporal-sql-tool --db "$1" create
  temporal-sql-tool --db "$1" setup-schema -v 0.0
  temporal-sql-tool --db "$1" update-schema -d "/etc/temporal/schema/postgresql/v12/$2/versioned"
}

upgrade temporal temporal
upgrade temporal_visibility visibility
