//! The connection to the runtime: registration, and answers to its calls. Every wait is bounded, and no answer is an error, because the
//! runtime does not start a container whose plugin answers with one.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use prost::Message as _;
use thiserror::Error;

use super::frame::{self, FrameError, Message, PLUGIN, REQUEST, RESPONSE, RUNTIME, Reader};
use super::messages::{
    ConfigureRequest, ConfigureResponse, ContainerAdjustment, CreateContainerRequest, CreateContainerResponse, RegisterPluginRequest,
    Request, Response, Status, SynchronizeRequest, SynchronizeResponse,
};

const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// Late: variables that other plugins set are in the request, and are kept.
const INDEX: &str = "90";
const NAME: &str = "fragprof";
/// `CREATE_CONTAINER` is the fourth event.
const EVENTS: i32 = 1 << 3;
/// The runtime closes the connection if registration takes longer (5 s by default).
const REGISTER_WITHIN: Duration = Duration::from_secs(5);
/// How often the thread looks whether it is to end. The runtime's messages wake it at once.
const STEP: Duration = Duration::from_millis(250);
/// A runtime that does not read: its answers are small.
const WRITE_WITHIN: Duration = Duration::from_secs(1);
/// gRPC's code for a method that does not exist.
const UNIMPLEMENTED: i32 = 12;

/// Why the connection ended, or was not made.
#[derive(Debug, Error)]
pub enum PluginError {
    /// No socket, or nobody there.
    #[error("cannot connect to {path}: {source} (is NRI enabled in the runtime's configuration?)")]
    Connect {
        /// The socket.
        path: std::path::PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The runtime closed it.
    #[error("the runtime closed the connection")]
    Closed,
    /// It cannot be read or written.
    #[error("the connection to the runtime: {0}")]
    Io(#[from] io::Error),
    /// It sent something else than NRI.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// It did not accept the plugin.
    #[error("the runtime did not register the plugin: {0}")]
    Refused(String),
}

/// What the connection asks for.
pub trait Handler {
    /// The runtime has accepted the plugin.
    fn connected(&mut self, runtime: &ConfigureRequest);
    /// A container is created; `None` = it starts untouched.
    fn create(&mut self, request: &CreateContainerRequest) -> Option<ContainerAdjustment>;
    /// A call that is not understood; it was answered all the same.
    fn not_understood(&mut self, method: &str);
    /// Whether to go on.
    fn goes_on(&mut self) -> bool;
}

/// Registers and answers until the handler ends it. Returns `Ok` only then.
///
/// # Errors
/// [`PluginError`].
pub fn serve(path: &Path, handler: &mut dyn Handler) -> Result<(), PluginError> {
    let stream = UnixStream::connect(path).map_err(|source| PluginError::Connect { path: path.to_owned(), source })?;
    stream.set_read_timeout(Some(STEP))?;
    stream.set_write_timeout(Some(WRITE_WITHIN))?;
    let mut connection = Connection { stream, reader: Reader::default() };
    let register = RegisterPluginRequest { plugin_name: NAME.to_owned(), plugin_idx: INDEX.to_owned() };
    let request = Request {
        service: RUNTIME_SERVICE.to_owned(),
        method: "RegisterPlugin".to_owned(),
        payload: register.encode_to_vec(),
        timeout_ns: i64::try_from(REGISTER_WITHIN.as_nanos()).unwrap_or(0),
    };
    connection.send(&Message { connection: RUNTIME, stream: 1, kind: REQUEST, payload: request.encode_to_vec() })?;
    let deadline = Instant::now() + REGISTER_WITHIN;
    let mut is_registered = false;
    while handler.goes_on() {
        connection.receive()?;
        if connection.reader.take_ignored() > 0 {
            handler.not_understood("a connection that is not used");
        }
        while let Some(message) = connection.reader.next_message() {
            match (message.connection, message.kind) {
                (RUNTIME, RESPONSE) => {
                    let response = Response::decode(message.payload.as_slice()).unwrap_or_default();
                    if let Some(status) = response.status.filter(|status| status.code != 0) {
                        return Err(PluginError::Refused(status.message));
                    }
                    is_registered = true;
                }
                (PLUGIN, REQUEST) => {
                    let response = answer(&message.payload, handler);
                    let payload = response.encode_to_vec();
                    connection.send(&Message { connection: PLUGIN, stream: message.stream, kind: RESPONSE, payload })?;
                }
                _ => handler.not_understood("a message of an unknown kind"),
            }
        }
        if !is_registered && Instant::now() > deadline {
            return Err(PluginError::Refused("no answer".to_owned()));
        }
    }
    Ok(())
}

struct Connection {
    stream: UnixStream,
    reader: Reader,
}

impl Connection {
    fn send(&mut self, message: &Message) -> Result<(), PluginError> {
        let bytes = frame::encode(message).ok_or(FrameError::TooLong(message.payload.len()))?;
        Ok(self.stream.write_all(&bytes)?)
    }

    /// Waits for bytes, for one step at most.
    fn receive(&mut self) -> Result<(), PluginError> {
        let mut bytes = [0; 16 << 10];
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(PluginError::Closed),
            Ok(read) => Ok(self.reader.push(bytes.get(..read).unwrap_or_default())?),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted) => {
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The answer to a call.
pub fn answer(payload: &[u8], handler: &mut dyn Handler) -> Response {
    let Ok(request) = Request::decode(payload) else {
        handler.not_understood("a request that cannot be read");
        return Response::default();
    };
    let call = request.payload.as_slice();
    let of = |payload: Vec<u8>| Response { status: None, payload };
    if request.service != PLUGIN_SERVICE {
        handler.not_understood(&request.service);
        let status = Status { code: UNIMPLEMENTED, message: format!("service {}", request.service) };
        return Response { status: Some(status), payload: Vec::new() };
    }
    match request.method.as_str() {
        "Configure" => {
            handler.connected(&ConfigureRequest::decode(call).unwrap_or_default());
            of(ConfigureResponse { events: EVENTS }.encode_to_vec())
        }
        "Synchronize" => {
            let more = SynchronizeRequest::decode(call).unwrap_or_default().more;
            of(SynchronizeResponse { more }.encode_to_vec())
        }
        "CreateContainer" => {
            let adjust = match CreateContainerRequest::decode(call) {
                Ok(request) => handler.create(&request),
                Err(_) => {
                    handler.not_understood("CreateContainer");
                    None
                }
            };
            of(CreateContainerResponse { adjust }.encode_to_vec())
        }
        // Events that were not asked for, and the runtime's end.
        _ => Response::default(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::net::UnixListener;

    use super::*;

    #[derive(Default)]
    struct Told(Vec<String>, usize);

    impl Handler for Told {
        fn connected(&mut self, runtime: &ConfigureRequest) {
            self.0.push(format!("connected {}", runtime.runtime_name));
        }
        fn create(&mut self, request: &CreateContainerRequest) -> Option<ContainerAdjustment> {
            self.0.push(format!("create {}", request.container.as_ref().unwrap().name));
            None
        }
        fn not_understood(&mut self, method: &str) {
            self.0.push(format!("not understood {method}"));
        }
        fn goes_on(&mut self) -> bool {
            self.1 += 1;
            self.1 < 200
        }
    }

    fn call(method: &str, payload: Vec<u8>) -> Vec<u8> {
        Request { service: PLUGIN_SERVICE.into(), method: method.into(), payload, timeout_ns: 0 }.encode_to_vec()
    }

    #[test]
    fn no_answer_to_a_container_is_an_error() {
        let mut told = Told::default();
        for payload in [b"\xff\xff".to_vec(), call("CreateContainer", b"\xff".to_vec()), call("Whatever", Vec::new())] {
            assert_eq!(answer(&payload, &mut told).status, None);
        }
        assert_eq!(told.0.len(), 2);
        let events = ConfigureResponse::decode(answer(&call("Configure", Vec::new()), &mut told).payload.as_slice()).unwrap().events;
        assert_eq!(events, 8);
    }

    #[test]
    fn it_registers_and_answers_until_the_runtime_closes_the_connection() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nri.sock");
        assert!(matches!(serve(&path, &mut Told::default()), Err(PluginError::Connect { .. })));
        let listener = UnixListener::bind(&path).unwrap();
        let runtime = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut connection = Connection { stream, reader: Reader::default() };
            let next = |connection: &mut Connection| loop {
                if let Some(message) = connection.reader.next_message() {
                    break message;
                }
                connection.receive().unwrap();
            };
            let register = next(&mut connection);
            assert_eq!((register.connection, register.stream, register.kind), (RUNTIME, 1, REQUEST));
            let request = Request::decode(register.payload.as_slice()).unwrap();
            assert_eq!((request.service.as_str(), request.method.as_str()), (RUNTIME_SERVICE, "RegisterPlugin"));
            let payload = Response::default().encode_to_vec();
            connection.send(&Message { connection: RUNTIME, stream: 1, kind: RESPONSE, payload }).unwrap();
            let payload = call("Configure", ConfigureRequest { runtime_name: "test".into(), ..Default::default() }.encode_to_vec());
            connection.send(&Message { connection: PLUGIN, stream: 1, kind: REQUEST, payload }).unwrap();
            assert_eq!(next(&mut connection).stream, 1);
            let container = super::super::messages::Container { name: "web".into(), ..Default::default() };
            let create = CreateContainerRequest { pod: None, container: Some(container) };
            let payload = call("CreateContainer", create.encode_to_vec());
            connection.send(&Message { connection: PLUGIN, stream: 3, kind: REQUEST, payload }).unwrap();
            assert_eq!(next(&mut connection).stream, 3);
        });
        let mut told = Told::default();
        assert!(matches!(serve(&path, &mut told), Err(PluginError::Closed)));
        runtime.join().unwrap();
        assert_eq!(told.0, ["connected test", "create web"]);
    }
}
