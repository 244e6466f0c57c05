#!/bin/sh
# Temporal's databases: made when they are missing, upgraded when they are old. SQL_* say where.
set -eu

update() {
  temporal-sql-tool --db "$1" update-schema -d "/etc/temporal/schema/postgresql/v12/$2/versioned"
}

prepare() {
  temporal-sql-tool --db "$1" create
  # Only a database without a schema gets one set up: doing it again would take the schema's version back to 0.0.
  update "$1" "$2" || { temporal-sql-tool --db "$1" setup-schema -v 0.0 && update "$1" "$2"; }
}

prepare temporal temporal
prepare temporal_visibility visibility
