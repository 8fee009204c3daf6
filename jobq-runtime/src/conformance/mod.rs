//! One list of cases, run against every database: what a store promises, rule by rule.
//!
//! Cases are named after the sentence they prove; the rule of the contract stands in front.

mod bed;
mod claim;

use bed::Bed;

/// Makes a test of every case for every database.
macro_rules! on_every_database {
    ($($group:ident: $($case:ident)+;)+) => {
        #[cfg(feature = "sqlite")]
        mod sqlite {
            use super::*;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() { $group::$case(Bed::sqlite().await).await }
            )+)+
        }
        #[cfg(feature = "postgres")]
        mod postgres {
            use super::*;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() { $group::$case(Bed::postgres().await).await }
            )+)+
        }
        #[cfg(feature = "postgres")]
        mod postgres18 {
            use super::*;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() {
                    // scripts/test says when there is no such server.
                    if let Some(bed) = Bed::postgres18().await { $group::$case(bed).await }
                }
            )+)+
        }
    };
}

on_every_database! {
    claim:
        f1_each_claim_raises_the_token_and_the_attempt
        f1_many_claimers_never_share_a_job
        o1_higher_priority_first_then_time_then_id
        r5_a_kind_nobody_asked_for_is_never_claimed;
}
