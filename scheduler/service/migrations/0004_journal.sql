-- What an attempt has written so far, as tokens of a vocabulary; the next attempt goes on from there.
alter table attempts add column journal integer[] not null default '{}';
alter table attempts add column vocabulary bigint not null default 0;
