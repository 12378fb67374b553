-- Tokens with which machines join. Only a hash of the secret is stored.
create table join_tokens (
    id uuid primary key,
    secret_hash bytea not null,
    -- Name that the machine must take; null if it may choose one.
    name text,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    -- Public NATS key of the machine that used the token.
    used_by text
);

-- Machines that joined, with their access to NATS.
create table machines (
    name text primary key,
    nats_key text not null unique,
    version text not null,
    joined_at timestamptz not null default now(),
    revoked_at timestamptz
);
