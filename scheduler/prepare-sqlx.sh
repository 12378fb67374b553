#!/bin/sh
# Writes the checked queries of cfq-scheduler to .sqlx/, which every other build reads instead of a database.
# Run it after changing a query or a migration. Needs Postgres 15 or newer: on PATH, under /usr/lib/postgresql, or in the
# folder POSTGRES_BIN. Works as root (the server then runs as the user nobody) and as a user; stops the server at the end.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)

bin=${POSTGRES_BIN:-}
if [ -z "$bin" ] && command -v initdb >/dev/null 2>&1 && command -v postgres >/dev/null 2>&1; then
    bin=$(dirname "$(command -v initdb)")
fi
if [ -z "$bin" ]; then
    bin=$(ls -d /usr/lib/postgresql/*/bin /usr/pgsql-*/bin 2>/dev/null | sort -V | tail -n 1)
fi
if [ ! -x "$bin/initdb" ]; then
    echo "no Postgres found: install one (apt install postgresql) or set POSTGRES_BIN to the folder of initdb" >&2
    exit 1
fi

work=$(mktemp -d /var/tmp/cfq-sqlx.XXXXXX)
mkdir "$work/new"
as_server() { "$@"; }
if [ "$(id -u)" = 0 ]; then
    chown 65534:65534 "$work"
    chmod 755 "$work"
    as_server() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
fi
server=
stop() {
    if [ -n "$server" ]; then
        kill -INT "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

cd /
as_server "$bin/initdb" -D "$work/data" -U cfq --auth=trust --no-sync -E UTF8 --locale=C >"$work/new.log"
single() { as_server "$bin/postgres" --single -j -c exit_on_error=on -D "$work/data" "$1" >"$work/new.log"; }
printf 'create database cfq;\n\n' | single postgres
for migration in "$root"/scheduler/service/migrations/*.sql; do
    { cat "$migration"; printf '\n\n'; } | single cfq
done
# No TCP: the server listens only on the socket in the work folder.
setpriv=
[ "$(id -u)" = 0 ] && setpriv="setpriv --reuid=65534 --regid=65534 --clear-groups"
$setpriv "$bin/postgres" -D "$work/data" -k "$work" -c listen_addresses= -c fsync=off >"$work/server.log" 2>&1 &
server=$!
tries=0
until [ -S "$work/.s.PGSQL.5432" ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || { cat "$work/server.log" >&2; exit 1; }
    sleep 0.1
done

cd "$root"
# The macros run only when the crate is compiled again.
touch scheduler/service/src/lib.rs
DATABASE_URL="postgres://cfq@localhost/cfq?host=$work" SQLX_OFFLINE=false SQLX_OFFLINE_DIR="$work/new" \
    cargo check -p cfq-scheduler
mkdir -p .sqlx
for old in .sqlx/query-*.json; do
    [ -e "$work/new/$(basename "$old")" ] || rm -f "$old"
done
cp "$work"/new/query-*.json .sqlx/
chmod 644 .sqlx/*.json
touch scheduler/service/src/lib.rs
echo "$(ls .sqlx | wc -l) queries in .sqlx/"
