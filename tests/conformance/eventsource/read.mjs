// Reads a session with the EventSource of Node until the server tells it not to come back. Prints a line for each
// connection, and at last the ids it got.
const [url, ...types] = process.argv.slice(2);
const source = new EventSource(url);
const seen = [];
// Node does not wait for a source that is about to connect again.
setInterval(() => {}, 1000);
source.addEventListener("connected", () => console.log("connected"));
for (const type of types) source.addEventListener(type, (event) => seen.push(event.lastEventId));
source.addEventListener("error", () => {
  if (source.readyState !== EventSource.CLOSED) return;
  console.log(JSON.stringify(seen));
  process.exit(0);
});
