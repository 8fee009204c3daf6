-- What queues may do across the fleet. Every claim reads it; one of a queue that is here locks the row.
create table if not exists jobq_queue_limits (
    queue varchar(100) not null primary key,
    -- how many of its jobs run at once
    max_running int,
    -- so many start in rate_per microseconds, and burst at once after a time without any
    rate_jobs int,
    rate_per bigint,
    burst int,
    -- when burst may start at once again
    full_at bigint not null default -9223372036854775808,
    constraint jobq_limit_check check (
        (max_running between 1 and 10000 or (max_running is null and rate_jobs is not null))
        and (rate_jobs is null) = (rate_per is null)
        and (rate_jobs is null) = (burst is null)
        and (rate_jobs is null or (rate_jobs > 0 and rate_per > 0 and burst > 0))
    )
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- The places for running jobs. A place is taken while its job runs under this very token; nothing frees it.
create table if not exists jobq_queue_slots (
    queue varchar(100) not null,
    slot int not null,
    -- that had it last
    job_id bigint not null default 0,
    token bigint not null default 0,
    primary key (queue, slot)
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

insert into jobq_migrations (version, name) values (5, 'limits');
