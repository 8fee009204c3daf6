//! The one connection that writes, and the thread that drives it.
//!
//! Whoever holds the file's write lock keeps every other writer out, the application's own
//! included. So a transaction of ours must never wait for the application: its statements run on a
//! thread of our own, which no job function that blocks its runtime can hold up. The thread does
//! one transaction after the other, so inside a process nobody contends for the lock; against other
//! processes it asks for the lock again and again, up to [`PATIENCE`].
//!
//! A caller that drops its future leaves no transaction open: one that has begun ends whole, one
//! that has not never begins.
//!
//! The connection knows a few verbs of ours (see [`super::verbs`]).

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{Connection, Executor, SqlStr};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use super::is_busy;

/// How long an operation asks for the write lock before it fails.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);

/// How long SQLite itself waits for a lock.
///
/// Its pauses grow from 1 ms to 100 ms and begin anew with every try. Short tries keep them short,
/// which is what it takes to get in beside a process that writes all the time.
pub(super) const ONE_TRY: Duration = Duration::from_millis(100);

/// Starts the thread when it is first needed, and again should it ever die.
pub(super) struct Writer {
    opening: Opening,
    queue: Mutex<Option<mpsc::Sender<Task>>>,
}

/// How the connection is opened.
#[derive(Clone)]
struct Opening {
    options: SqliteConnectOptions,
    /// What it is taught.
    verbs: Vec<SqlStr>,
}

type Task = Box<dyn FnOnce(&mut Desk) + Send>;

/// The write lock, held by an open transaction; dropping it rolls the transaction back.
pub(super) struct Locked {
    connection: SqliteConnection,
    /// How long others kept the lock from us.
    pub(super) waited: Duration,
}

impl Writer {
    pub(super) fn new(options: &SqliteConnectOptions, verbs: Vec<SqlStr>) -> Self {
        let options = options.clone().busy_timeout(ONE_TRY);
        Self { opening: Opening { options, verbs }, queue: Mutex::new(None) }
    }

    /// Does `work` in a transaction that holds the write lock from its beginning.
    ///
    /// Nothing is written unless all of it is.
    pub(super) async fn write<T, W>(&self, work: W) -> sqlx::Result<T>
    where
        T: Send + 'static,
        W: AsyncFnOnce(&mut Locked) -> sqlx::Result<T> + Send + 'static,
    {
        let patience_ends = Instant::now() + PATIENCE;
        let (reply, answer) = oneshot::channel();
        self.send(Box::new(move |desk| {
            let done = desk.transact(work, patience_ends, || !reply.is_closed());
            // Nobody listens when the caller has dropped its future.
            drop(reply.send(done));
        }))?;
        answer.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
    }

    fn send(&self, task: Task) -> sqlx::Result<()> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let task = match &*queue {
            Some(open) => match open.send(task) {
                Ok(()) => return Ok(()),
                // A task panicked and took the thread with it.
                Err(mpsc::SendError(task)) => task,
            },
            None => task,
        };
        let open = queue.insert(start(self.opening.clone())?);
        open.send(task).map_err(|_| sqlx::Error::WorkerCrashed)
    }
}

/// Starts the thread; it ends when its sender is dropped.
fn start(opening: Opening) -> std::io::Result<mpsc::Sender<Task>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let (sender, tasks) = mpsc::channel::<Task>();
    std::thread::Builder::new().name("jobq-sqlite".to_owned()).spawn(move || {
        let mut desk = Desk { opening, runtime, connection: None };
        for task in tasks {
            task(&mut desk);
        }
    })?;
    Ok(sender)
}

/// What the thread works with.
struct Desk {
    opening: Opening,
    runtime: Runtime,
    /// Opened when first used; outside a transaction. After an error it is not kept: nothing is
    /// known about its state.
    connection: Option<SqliteConnection>,
}

impl Desk {
    fn transact<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut Locked) -> sqlx::Result<T>,
        patience_ends: Instant,
        wanted: impl Fn() -> bool,
    ) -> sqlx::Result<T> {
        let Self { opening, runtime, connection } = self;
        runtime.block_on(async {
            let mut locked = lock(opening, connection, patience_ends, &wanted).await?;
            if !wanted() {
                locked.execute("rollback").await?;
                *connection = Some(locked.connection);
                // Nobody hears it.
                return Err(sqlx::Error::WorkerCrashed);
            }
            let done = work(&mut locked).await?;
            locked.execute("commit").await?;
            *connection = Some(locked.connection);
            Ok(done)
        })
    }
}

/// Begins a transaction that holds the write lock.
async fn lock(
    opening: &Opening,
    idle: &mut Option<SqliteConnection>,
    patience_ends: Instant,
    wanted: impl Fn() -> bool,
) -> sqlx::Result<Locked> {
    let asked = Instant::now();
    loop {
        match begin(opening, idle).await {
            Ok(connection) => return Ok(Locked { connection, waited: asked.elapsed() }),
            Err(error) if is_busy(&error) && Instant::now() < patience_ends && wanted() => {
                tokio::time::sleep(Duration::from_millis(5).mul_f64(rand::random())).await;
            }
            Err(error) => return Err(error),
        }
    }
}

impl Opening {
    async fn connect(&self) -> sqlx::Result<SqliteConnection> {
        let mut connection = SqliteConnection::connect_with(&self.options).await?;
        for verb in &self.verbs {
            connection.execute(verb.clone()).await?;
        }
        Ok(connection)
    }
}

async fn begin(
    opening: &Opening,
    idle: &mut Option<SqliteConnection>,
) -> sqlx::Result<SqliteConnection> {
    let mut connection = match idle.take() {
        Some(connection) => connection,
        None => opening.connect().await?,
    };
    match connection.execute("begin immediate").await {
        Ok(_) => Ok(connection),
        Err(error) => {
            if is_busy(&error) {
                *idle = Some(connection);
            }
            Err(error)
        }
    }
}

impl Deref for Locked {
    type Target = SqliteConnection;
    fn deref(&self) -> &SqliteConnection {
        &self.connection
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }
}
