//! A PostgreSQL server of one test's own, to be stopped and started, and a wire to be cut.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A server in a scratch folder; stopped when dropped.
pub(crate) struct Server {
    bin: PathBuf,
    user: Option<String>,
    folder: tempfile::TempDir,
    port: u16,
}

impl Server {
    pub(crate) fn start() -> Self {
        let bin = std::env::var("JOBQ_TEST_PG_BIN").expect(
            "this test starts a PostgreSQL server of its own: run `scripts/test`, or set \
             JOBQ_TEST_PG_BIN to the folder of initdb and pg_ctl",
        );
        let user = std::env::var("JOBQ_TEST_PG_USER").ok().filter(|user| !user.is_empty());
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a free port")
            .port();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let server = Self { bin: bin.into(), user, folder, port };
        if let Some(user) = &server.user {
            run(Command::new("chown").arg(user).arg(server.folder.path()));
        }
        let data = server.data();
        run(server
            .program("initdb")
            .args(["-U", "postgres", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8", "-D"])
            .arg(&data));
        server.up();
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub(crate) fn up(&self) {
        let options = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=100",
            self.port
        );
        run(self
            .program("pg_ctl")
            .arg("-D")
            .arg(self.data())
            .args(["-s", "-w", "-t", "60", "-o", &options, "-l"])
            .arg(self.folder.path().join("server.log"))
            .arg("start"));
    }

    /// Stops the server: `fast` closes connections, `immediate` is like pulling the plug.
    pub(crate) fn down(&self, mode: &str) {
        run(self
            .program("pg_ctl")
            .arg("-D")
            .arg(self.data())
            .args(["-s", "-w", "-m", mode, "stop"]));
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A server program, run as a user that it accepts.
    fn program(&self, name: &str) -> Command {
        let path = self.bin.join(name);
        let mut command = match &self.user {
            None => Command::new(path),
            Some(user) => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid", user, "--regid"]).arg(group_of(user)).arg("--init-groups");
                command.arg("--").arg(path);
                command
            }
        };
        command.env("LC_ALL", "C").current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut stop = self.program("pg_ctl");
        let _ = stop.arg("-D").arg(self.data()).args(["-s", "-m", "immediate", "stop"]).status();
    }
}

fn group_of(user: &str) -> String {
    let output = Command::new("id").args(["-gn", user]).output().expect("id can be run");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn run(command: &mut Command) {
    let output = command.stderr(Stdio::piped()).output().expect("the program can be run");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
}

/// A wire between a worker and its server.
pub(crate) struct Wire {
    pub(crate) port: u16,
    mode: watch::Sender<Mode>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// Bytes pass.
    Whole,
    /// Connections stay open, but nothing passes, and new ones are accepted and never answered.
    BlackHole,
}

impl Wire {
    pub(crate) async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let own_port = listener.local_addr().expect("a bound port").port();
        let mode = watch::Sender::new(Mode::Whole);
        let modes = Arc::new(mode.subscribe());
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut mode = (*modes).clone();
                tokio::spawn(async move {
                    drop(mode.wait_for(|mode| *mode == Mode::Whole).await);
                    let Ok(mut far) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => (),
                        () = async { drop(mode.wait_for(|mode| *mode == Mode::BlackHole).await) } => {
                            // Held open, both ends, for as long as the test runs.
                            std::future::pending::<()>().await;
                        }
                    }
                });
            }
        });
        Self { port: own_port, mode }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}
