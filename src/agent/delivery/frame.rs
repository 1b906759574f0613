//! The framing of NRI: ttrpc messages on two connections that share a unix socket. Pure; any bytes may come.
//!
//! ```text
//! connection (4 bytes) │ length (4) │ payload …                      the multiplexer's frame, of any length
//!                        └─ length (4) │ stream (4) │ type (1) │ flags (1) │ message …     ttrpc's, cut into such frames anywhere
//! ```
//!
//! Numbers are big-endian (containerd/nri, pkg/net/multiplex; containerd/ttrpc, PROTOCOL.md).

use std::collections::VecDeque;

use thiserror::Error;

/// On this connection the runtime calls the plugin.
pub const PLUGIN: u32 = 1;
/// On this one the plugin calls the runtime.
pub const RUNTIME: u32 = 2;
/// A request.
pub const REQUEST: u8 = 1;
/// A response.
pub const RESPONSE: u8 = 2;
/// Flag of a request after which none follows on its stream.
pub const CLOSED: u8 = 1;

/// Largest message of ttrpc.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
const HEADER_BYTES: usize = 10;
const FRAME_HEADER_BYTES: usize = 8;
/// The peer's multiplexer sends a message with its header in one frame at most.
const FRAME_BYTES_MAX: usize = MESSAGE_BYTES_MAX + HEADER_BYTES;
/// Largest frame written. The peer reads a frame into a buffer of its reader, which holds 4096 bytes, unless the rest of a message is longer.
const WRITTEN_BYTES_MAX: usize = 4096;
/// Messages that wait to be handled. The runtime sends the next request when the last one was answered.
const WAITING_MAX: usize = 256;

/// What cannot be read. The connection is closed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FrameError {
    /// A frame or message that is too long.
    #[error("the runtime sent a message of {0} bytes, more than {MESSAGE_BYTES_MAX}")]
    TooLong(usize),
    /// More messages than the runtime sends without an answer.
    #[error("the runtime sent {WAITING_MAX} messages without waiting for an answer")]
    TooMany,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// [`PLUGIN`] or [`RUNTIME`].
    pub connection: u32,
    /// The number of the request on its connection.
    pub stream: u32,
    /// [`REQUEST`], [`RESPONSE`], or another.
    pub kind: u8,
    /// Protobuf.
    pub payload: Vec<u8>,
}

/// Puts messages together from the bytes of the socket.
#[derive(Debug, Default)]
pub struct Reader {
    bytes: Vec<u8>,
    /// Bytes of a message that is not complete, by connection.
    open: [Vec<u8>; 2],
    ready: VecDeque<Message>,
    /// Bytes on connections that nobody uses.
    ignored_bytes: u64,
}

fn number(bytes: &[u8]) -> u32 {
    bytes.try_into().map_or(0, u32::from_be_bytes)
}

impl Reader {
    /// Adds bytes as they came.
    ///
    /// # Errors
    /// [`FrameError`]; the reader must then not be used further.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), FrameError> {
        self.bytes.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(header) = self.bytes.get(at..at + FRAME_HEADER_BYTES) {
            let (connection, length) = (number(&header[..4]), number(&header[4..]) as usize);
            if length > FRAME_BYTES_MAX {
                return Err(FrameError::TooLong(length));
            }
            let Some(payload) = self.bytes.get(at + FRAME_HEADER_BYTES..at + FRAME_HEADER_BYTES + length) else { break };
            match connection {
                PLUGIN | RUNTIME => {
                    let open = &mut self.open[connection as usize - 1];
                    open.extend_from_slice(payload);
                    take_messages(open, connection, &mut self.ready)?;
                }
                _ => self.ignored_bytes += length as u64,
            }
            at += FRAME_HEADER_BYTES + length;
        }
        self.bytes.drain(..at);
        Ok(())
    }

    /// The next message.
    pub fn next_message(&mut self) -> Option<Message> {
        self.ready.pop_front()
    }

    /// Bytes on connections that nobody uses, since this was last called.
    pub fn take_ignored(&mut self) -> u64 {
        std::mem::take(&mut self.ignored_bytes)
    }

    /// Bytes held.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.bytes.len() + self.open.iter().map(Vec::len).sum::<usize>()
    }
}

fn take_messages(open: &mut Vec<u8>, connection: u32, ready: &mut VecDeque<Message>) -> Result<(), FrameError> {
    let mut at = 0;
    while let Some(header) = open.get(at..at + HEADER_BYTES) {
        let (length, stream, kind) = (number(&header[..4]) as usize, number(&header[4..8]), header[8]);
        if length > MESSAGE_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let Some(payload) = open.get(at + HEADER_BYTES..at + HEADER_BYTES + length) else { break };
        if ready.len() >= WAITING_MAX {
            return Err(FrameError::TooMany);
        }
        ready.push_back(Message { connection, stream, kind, payload: payload.to_vec() });
        at += HEADER_BYTES + length;
    }
    open.drain(..at);
    Ok(())
}

/// The bytes of a message; `None` if it is too long.
#[must_use]
pub fn encode(message: &Message) -> Option<Vec<u8>> {
    let length = u32::try_from(message.payload.len()).ok().filter(|length| *length as usize <= MESSAGE_BYTES_MAX)?;
    let mut whole = Vec::with_capacity(HEADER_BYTES + message.payload.len());
    whole.extend_from_slice(&length.to_be_bytes());
    whole.extend_from_slice(&message.stream.to_be_bytes());
    whole.push(message.kind);
    whole.push(if message.kind == REQUEST { CLOSED } else { 0 });
    whole.extend_from_slice(&message.payload);
    let mut out = Vec::with_capacity(whole.len() + FRAME_HEADER_BYTES);
    for part in whole.chunks(WRITTEN_BYTES_MAX) {
        out.extend_from_slice(&message.connection.to_be_bytes());
        out.extend_from_slice(&u32::try_from(part.len()).unwrap_or(0).to_be_bytes());
        out.extend_from_slice(part);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_is_framed_as_the_runtime_frames_it() {
        let message = Message { connection: RUNTIME, stream: 1, kind: REQUEST, payload: b"ab".to_vec() };
        let bytes = [0, 0, 0, 2, 0, 0, 0, 12, 0, 0, 0, 2, 0, 0, 0, 1, 1, 1, b'a', b'b'];
        assert_eq!(encode(&message).unwrap(), bytes);
    }

    #[test]
    fn what_is_too_long_is_refused_before_it_is_held() {
        let mut reader = Reader::default();
        assert!(matches!(reader.push(&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]), Err(FrameError::TooLong(_))));
        let mut reader = Reader::default();
        let header = [0, 0, 0, 1, 0, 0, 0, 10, 0xff, 0, 0, 0, 0, 0, 0, 1, 1, 0];
        assert!(matches!(reader.push(&header), Err(FrameError::TooLong(_))));
        let mut reader = Reader::default();
        let empty = encode(&Message { connection: PLUGIN, stream: 1, kind: REQUEST, payload: Vec::new() }).unwrap();
        assert_eq!((0..=WAITING_MAX).find_map(|_| reader.push(&empty).err()), Some(FrameError::TooMany));
    }

    #[test]
    fn other_connections_are_skipped() {
        let mut reader = Reader::default();
        let mut bytes = vec![0, 0, 0, 9, 0, 0, 0, 3, 1, 2, 3];
        let message = Message { connection: PLUGIN, stream: 7, kind: REQUEST, payload: vec![1] };
        bytes.extend(encode(&message).unwrap());
        reader.push(&bytes).unwrap();
        assert_eq!((reader.next_message(), reader.next_message(), reader.take_ignored()), (Some(message), None, 3));
    }

    proptest! {
        #[test]
        fn messages_are_put_together_however_they_are_cut(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9000), 1..4),
            cut in 1usize..5000,
        ) {
            let sent: Vec<Message> = payloads.into_iter().zip(1..).map(|(payload, stream)| {
                Message { connection: 1 + stream % 2, stream, kind: RESPONSE, payload }
            }).collect();
            let bytes: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
            let mut reader = Reader::default();
            for part in bytes.chunks(cut) {
                reader.push(part).unwrap();
            }
            let got: Vec<Message> = std::iter::from_fn(|| reader.next_message()).collect();
            prop_assert_eq!(got, sent);
            prop_assert_eq!(reader.held_bytes(), 0);
        }
    }
}
