// MQTT.js behind the verbs of clients.py: one order as JSON a line, one JSON object a line as answer, both with `id`.
const mqtt = require("mqtt");
const readline = require("readline");

const clients = new Map();
const say = (id, line) => process.stdout.write(JSON.stringify({ id, ...line }) + "\n");

function connect(order) {
  const client = mqtt.connect({
    host: "127.0.0.1",
    port: order.port,
    protocolVersion: order.version,
    clientId: order.clientId,
    clean: !order.expiry,
    properties: order.version === 5 && order.expiry ? { sessionExpiryInterval: order.expiry } : undefined,
    will: order.will ? { topic: order.will[0], payload: order.will[1], qos: 1, retain: false } : undefined,
    reconnectPeriod: 0,
  });
  client.on("error", (error) => say(order.id, { error: String(error) }));
  return client;
}

const orders = {
  read(order) {
    const client = connect(order);
    clients.set(order.id, client);
    client.on("message", (topic, payload, { qos, retain }) =>
      say(order.id, { topic, payload: payload.toString("hex"), qos, retain }));
    client.on("connect", () =>
      client.subscribe(order.filter, { qos: 2 }, (error) => say(order.id, error ? { error: String(error) } : { ready: true })));
  },

  publish(order) {
    const client = connect(order);
    const next = () => {
      if (!order.messages.length) return client.end(false, () => say(order.id, { done: true }));
      const [topic, payload, qos, retain] = order.messages.shift();
      client.publish(topic, payload, { qos, retain }, (error) => (error ? say(order.id, { error: String(error) }) : next()));
    };
    client.on("connect", next);
  },

  close(order) {
    clients.get(order.id).end(false, () => say(order.id, { done: true }));
  },

  drop(order) {
    clients.get(order.id).stream.destroy();
    say(order.id, { done: true });
  },
};

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const order = JSON.parse(line);
  orders[order.do](order);
}).on("close", () => process.exit(0));
