// Requests to the agent. Pages show its answers and compute only sums of them.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Longest wait for an answer, in milliseconds: after it the page reports the failure.
const WAIT_MAX_MS = 15000;

export async function ask(path, signal) {
  const limit = AbortSignal.timeout(WAIT_MAX_MS);
  let answer;
  try {
    answer = await fetch(path, { signal: signal ? AbortSignal.any([signal, limit]) : limit });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, limit.aborted ? "the agent does not answer" : "the agent cannot be reached");
  }
  if (!answer.ok) {
    let message = `${answer.status} ${answer.statusText}`;
    try {
      message = (await answer.json()).error ?? message;
    } catch {
      // Not JSON: the status is enough.
    }
    throw new Refused(answer.status, message);
  }
  return answer.json();
}

const of = (pid, rest = "") => `api/v1/processes/${encodeURIComponent(pid)}${rest}`;
const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? `?${new URLSearchParams(given)}` : "";
};

export const processes = (signal) => ask("api/v1/processes", signal);
export const process = (pid, signal) => ask(of(pid), signal);
export const heap = (pid, signal) => ask(of(pid, "/heap"), signal);
export const explain = (pid, signal) => ask(of(pid, "/explain"), signal);
export const map = (pid, values, signal) => ask(of(pid, `/map${query(values)}`), signal);
export const history = (pid, values, signal) => ask(of(pid, `/history${query(values)}`), signal);
export const profile = (pid, values, signal) => ask(of(pid, `/profile${query(values)}`), signal);
export const stacks = (pid, values, signal) => ask(of(pid, `/stacks${query(values)}`), signal);
export const diff = (pid, values, signal) => ask(of(pid, `/diff${query(values)}`), signal);
export const agent = (signal) => ask("api/v1/agent", signal);
export const events = (values, signal) => ask(`api/v1/events${query(values)}`, signal);
export const event = (id, signal) => ask(`api/v1/events/${encodeURIComponent(id)}`, signal);
export const eventProfile = (id, values, signal) => ask(`api/v1/events/${encodeURIComponent(id)}/profile${query(values)}`, signal);
