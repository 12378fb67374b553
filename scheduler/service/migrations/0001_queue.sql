-- The truth. Rules about it:
--   * Every write is a compare-and-set on (id, attempt, lease); terminal states never change.
--   * Lock order: leader row, task row, job row. An event's sequence is assigned under its task's row lock, so a reader
--     that has seen n has seen everything before n.
--   * Bodies that carry a model's or a user's words are json, not jsonb: jsonb refuses U+0000.

create table tasks (
    id              uuid primary key,
    number          bigint generated always as identity unique,
    idempotency_key text unique,
    body_hash       text not null,
    spec            json not null,
    title           text not null,
    priority        smallint not null check (priority between 0 and 3),
    deadline        timestamptz,
    state           text not null check (state in ('queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused',
                                                   'escalated', 'merged', 'accepted', 'failed', 'cancelled')),
    loop_state      text not null default 'idle' check (loop_state in ('idle', 'generating', 'reviewing', 'revising',
                                                                       'converged', 'escalated', 'failed')),
    reason          text not null default '',
    threshold       double precision not null,
    max_iterations  integer not null,
    iteration       integer not null default 0,
    best_iteration  integer,
    best_score      double precision,
    retry_of        uuid references tasks,
    attempt         integer not null default 0,
    lease           uuid unique,
    lease_expires   timestamptz,
    runner          text,
    runner_boot     uuid,
    losses          integer not null default 0,
    next_seq        integer not null default 0,
    next_event      bigint not null default 0,
    active_ms       bigint not null default 0,
    pr              bigint,
    delivered_branch text,
    delivered_commit text,
    created_at      timestamptz not null default now(),
    updated_at      timestamptz not null default now(),
    check ((lease is null) = (lease_expires is null)),
    -- Only a running task holds a lease.
    check (lease is null or state = 'running')
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- No index holds lease_expires: a beat touches it every two seconds and must stay a heap-only update.
create index tasks_ready on tasks (priority, created_at) where state = 'ready';
create index tasks_by_runner on tasks (runner) where lease is not null;

create table jobs (
    id              uuid primary key,
    task            uuid not null references tasks,
    seq             integer not null,
    role            text not null check (role in ('alpha', 'beta')),
    n               smallint not null,
    model           text not null,
    priority        smallint not null check (priority between 0 and 3),
    deadline        timestamptz,
    prompt          json not null,
    prompt_bytes    bigint not null,
    prefix          json not null,
    max_tokens      bigint not null,
    state           text not null check (state in ('queued', 'placed', 'running', 'done', 'failed', 'dead', 'cancelled')),
    attempt         integer not null default 0,
    lease           uuid unique,
    lease_expires   timestamptz,
    node            text,
    node_boot       uuid,
    placed_at       timestamptz,
    accepted_at     timestamptz,
    started         boolean not null default false,
    running_ms      bigint not null default 0,
    losses          integer not null default 0,
    failures        integer not null default 0,
    first_failure_at timestamptz,
    setbacks        json not null default '{}',
    never           json not null default '{}',
    known_need      bigint,
    failure         json,
    completion      json,
    usage           json,
    placement       text not null default '',
    created_at      timestamptz not null default now(),
    updated_at      timestamptz not null default now(),
    unique (task, seq, role, n),
    check ((state in ('placed', 'running')) = (lease is not null)),
    check ((state = 'running') = (lease_expires is not null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

create index jobs_live on jobs (created_at) where state in ('queued', 'placed', 'running');
create index jobs_by_node on jobs (node) where state in ('placed', 'running');

-- One try of a job: what a late or repeated report is compared with, and the evidence of a dead one.
create table attempts (
    job         uuid not null references jobs,
    attempt     integer not null,
    lease       uuid not null,
    node        text not null,
    node_boot   uuid not null,
    placement   text not null,
    placed_at   timestamptz not null default now(),
    accepted_at timestamptz,
    ended_at    timestamptz,
    -- done, failed, released, refused, unplaced, lost, cancelled; null while it lives.
    outcome     text check (outcome in ('done', 'failed', 'released', 'refused', 'unplaced', 'lost', 'cancelled')),
    detail      text not null default '',
    primary key (job, attempt)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);

-- The loop, step by step. A step is committed before anybody acts on it.
create table steps (
    task      uuid not null references tasks,
    seq       integer not null,
    attempt   integer not null,
    lease     uuid,
    kind      text not null,
    step      json not null,
    active_ms bigint not null,
    pr        bigint,
    at        timestamptz not null default now(),
    primary key (task, seq)
);

create table events (
    id       bigint generated always as identity primary key,
    -- The global feed reads in (xid, id) order and only below the oldest running transaction: nothing can still appear there.
    xid      xid8 not null default pg_current_xact_id(),
    task     uuid not null references tasks,
    number   bigint not null,
    task_seq bigint not null,
    at       timestamptz not null default clock_timestamp(),
    body     json not null,
    unique (task, task_seq)
);
create index events_feed on events (xid, id);

create table blobs (
    hash       text primary key,
    size       bigint not null check (size > 0),
    chunks     integer not null check (chunks > 0),
    complete   boolean not null default false,
    created_at timestamptz not null default now()
);

create table blob_chunks (
    hash  text not null references blobs on delete cascade,
    index integer not null,
    data  bytea not null,
    primary key (hash, index)
);

-- Which tasks a blob belongs to: a live lease of one of them may read it.
create table blob_refs (
    hash text not null references blobs on delete cascade,
    task uuid not null references tasks,
    primary key (hash, task)
);

create table iterations (
    task         uuid not null references tasks,
    iteration    integer not null,
    artifact     uuid not null,
    content_hash text not null,
    commit       text,
    model        text not null,
    paths        json not null,
    findings     json not null default '[]',
    quarantine   json,
    decided      json,
    prompt_tokens bigint not null,
    output_tokens bigint not null,
    primary key (task, iteration)
);

-- The bytes are in the step that made it, inline or as a blob.
create table artifacts (
    id           uuid primary key,
    task         uuid not null,
    iteration    integer not null,
    seq          integer not null,
    content_hash text not null,
    commit       text,
    parent       text not null,
    foreign key (task, iteration) references iterations,
    foreign key (task, seq) references steps,
    unique (task, iteration)
);

create table reviews (
    task      uuid not null,
    iteration integer not null,
    job       uuid not null,
    model     text not null,
    review    json not null,
    at        timestamptz not null default now(),
    primary key (task, iteration, job),
    foreign key (task, iteration) references iterations
);

create table internal_prs (
    number       bigint generated always as identity primary key,
    task         uuid not null unique references tasks,
    title        text not null,
    state        text not null check (state in ('pending_qc', 'qc_approved', 'qc_rejected', 'pending_coordinator',
                                                'approved', 'merged', 'closed')),
    branch       text not null,
    head         text not null,
    base         text not null,
    merge_commit text
);

create table internal_pr_moves (
    pr  bigint not null references internal_prs,
    n   integer not null,
    "to" text not null,
    why text not null,
    at  timestamptz not null default now(),
    primary key (pr, n)
);

create table questions (
    id          uuid primary key,
    task        uuid not null references tasks,
    state       text not null default 'open' check (state in ('open', 'answered', 'closed')),
    priority    smallint not null default 1,
    text        text not null,
    reason      json not null,
    actions     json not null,
    recommendation text not null,
    answer      json,
    answered_by text,
    created_at  timestamptz not null default now(),
    answered_at timestamptz
);
create unique index questions_open on questions (task) where state = 'open';

create table nodes (
    id               text primary key,
    boot             uuid not null,
    version          text not null,
    devices          json not null,
    ledger           json not null,
    last_seen        timestamptz not null default now(),
    left_out_version bigint,
    left_out_at      timestamptz
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

create table runners (
    id        text primary key,
    boot      uuid not null,
    version   text not null,
    last_seen timestamptz not null default now()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

create table leader (
    only_one   boolean primary key default true check (only_one),
    generation bigint not null,
    holder     uuid not null,
    expires_at timestamptz not null
) with (fillfactor = 50);
insert into leader (generation, holder, expires_at)
values (0, '00000000-0000-0000-0000-000000000000', '-infinity');
