//! Wake-ups inside one process: an enqueue pokes the runtimes beside it.
//!
//! A poke is a hint. A job enqueued in a transaction is poked for before it commits, so a
//! runtime answers a poke by looking several times at growing distances. The guarantee is the
//! poll, always.

use std::sync::LazyLock;

use tokio::sync::watch;

static POKES: LazyLock<watch::Sender<u64>> = LazyLock::new(|| watch::Sender::new(0));

/// Tells every runtime of this process that there may be something to claim.
pub(crate) fn poke() {
    POKES.send_modify(|count| *count += 1);
}

/// Follows the pokes from now on.
#[cfg(feature = "runtime")]
pub(crate) fn pokes() -> watch::Receiver<u64> {
    POKES.subscribe()
}
