-- What is paused: of these queues and kinds nothing is claimed. Every claim reads it.
create table if not exists jobq_pauses (
    -- 'queue' or 'kind'
    scope varchar(100) not null,
    name varchar(100) not null,
    since bigint not null default (now_us()),
    -- for people
    reason text,
    primary key (scope, name),
    constraint jobq_pauses_scope_check check (scope in ('queue', 'kind'))
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

insert into jobq_migrations (version, name) values (4, 'pauses');
