//! One list of cases, run against every database: what a store promises, rule by rule.
//!
//! Cases are named after the sentence they prove; the rule of the contract stands in front.

mod bed;
mod claim;
mod enqueue;
mod fence;
mod fields;
mod payloads;
mod rows;
mod sample;
mod second_look;
mod settle;
mod wait;

use bed::Bed;

/// Makes a test of every case, each with tables of its own.
macro_rules! tests {
    ($name:ident, $bed:expr, { $($group:ident: $($case:ident)+;)+ }) => {
        mod $name {
            use super::*;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() {
                    if let Some(bed) = $bed { $group::$case(bed).await }
                }
            )+)+
        }
    };
}

macro_rules! on_every_database {
    ($($cases:tt)+) => {
        #[cfg(feature = "sqlite")]
        tests!(sqlite, Some(Bed::sqlite().await), { $($cases)+ });
        #[cfg(feature = "postgres")]
        tests!(postgres, Some(Bed::postgres().await), { $($cases)+ });
        // scripts/test says when there is no such server.
        #[cfg(feature = "postgres")]
        tests!(postgres18, Bed::postgres18().await, { $($cases)+ });
    };
}

/// For what only a server with many writers at once can get wrong.
macro_rules! on_postgres_only {
    ($($cases:tt)+) => {
        #[cfg(feature = "postgres")]
        tests!(only_postgres, Some(Bed::postgres().await), { $($cases)+ });
        #[cfg(feature = "postgres")]
        tests!(only_postgres18, Bed::postgres18().await, { $($cases)+ });
    };
}

on_every_database! {
    claim:
        f1_each_claim_raises_the_token_and_the_attempt
        f1_many_claimers_never_share_a_job
        o1_higher_priority_first_then_time_then_id
        r5_a_kind_nobody_asked_for_is_never_claimed;
    enqueue:
        e1_a_job_exists_once_its_transaction_commits
        e1_a_job_is_gone_when_its_transaction_rolls_back
        e1_every_target_writes_the_job
        e1_within_writes_to_its_clients_tables_in_one_transaction
        e1_a_dropped_call_writes_all_or_none
        e2_ids_come_in_the_order_of_the_jobs
        e2_ids_come_in_order_also_when_many_enqueue_at_once
        e2_no_jobs_are_no_work
        e2_one_that_is_refused_leaves_none
        e2_one_that_is_refused_leaves_none_in_a_callers_transaction
        e2_one_that_cannot_be_checked_leaves_none;
    fields:
        e3_what_was_asked_for_is_given_back_by_the_claim
        e3_a_delayed_job_is_not_claimed_before_its_time
        e3_run_at_is_kept_to_the_microsecond
        e3_a_time_in_the_past_means_now
        e3_times_count_from_the_statement_and_not_from_begin
        e3_the_ends_of_every_range_are_taken
        e3_values_out_of_range_are_typed_errors_and_write_nothing
        e3_a_queue_that_nobody_serves_keeps_its_jobs
        e7_a_plain_insert_is_a_job
        f1_each_queue_of_a_claim_has_its_own_limit
        o1_jobs_of_one_call_are_claimed_in_their_order
        o1_next_in_line_comes_before_every_priority;
    payloads:
        e4_edge_values_come_back_as_they_were
        e4_a_megabyte_comes_back_as_it_was
        e4_the_deepest_nesting_comes_back_and_a_deeper_one_is_refused
        e4_what_json_cannot_hold_is_a_typed_error
        e4_the_payload_limit_is_the_clients
        e4_any_text_is_kept_byte_for_byte;
    settle:
        l2_a_claim_changes_token_attempt_and_holder_only
        l2_completing_moves_the_job_to_the_history
        l2_cancelling_moves_the_job_to_the_history
        l2_requeueing_frees_the_job_for_a_later_time
        l2_what_goes_next_is_in_the_express_band_until_its_next_delay
        l2_burying_moves_the_job_to_the_dead_letters
        l2_isolating_changes_nothing_else
        l3_every_attempt_that_did_not_complete_is_kept
        l3_an_interrupted_attempt_is_kept_under_its_number
        l3_a_retention_of_zero_leaves_nothing
        l3_a_retention_of_zero_leaves_nothing_of_a_redriven_job
        l3_a_retention_for_ever_is_kept
        r2_a_delay_for_ever_is_kept
        r2_a_large_result_is_kept_byte_for_byte
        r3_any_error_text_that_was_made_storable_is_kept_whole;
    fence:
        f2_an_older_token_writes_nothing
        f2_the_right_token_of_another_session_writes_nothing
        f2_a_token_from_the_future_writes_nothing
        f2_after_a_rescue_nothing_is_written
        f2_after_a_rescue_buried_the_job_nothing_is_written
        f2_after_completion_nothing_is_written
        f2_after_completion_without_history_nothing_is_written
        f2_after_a_redrive_nothing_is_written
        f2_an_id_is_never_used_again;
    second_look:
        f2_what_a_lost_reply_had_written_is_found
        f2_what_a_lost_request_had_not_written_is_written
        f2_a_rescue_is_not_mistaken_for_a_lost_reply
        f2_a_lost_reply_whose_job_went_on_writes_nothing
        f2_a_burial_that_was_redriven_is_found
        f2_one_job_twice_in_a_batch_is_written_once
        f2_a_batch_of_300_in_any_order_is_written_job_by_job
        d4_overlapping_batches_never_deadlock_and_write_each_job_once
        s3_a_job_to_be_cancelled_is_not_requeued
        s3_a_job_that_ends_before_it_is_cancelled_has_ended;
}

on_postgres_only! {
    enqueue:
        e1_higher_isolation_levels_commit_and_roll_back_alike
        e1_a_serialization_failure_is_a_typed_error
        r6_a_broken_connection_names_the_ids_to_look_up;
    second_look:
        f2_a_locked_row_holds_up_nobody_else;
}
