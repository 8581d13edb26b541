// An output of a cell in Colab as far as a widget sees it: Colab's own widget manager, and a kernel that a test plays.

import { createWidgetManager } from "./manager.min.js";

const states = new Map(), comms = new Map();
window.sent = [];
// Colab's manager loads a widget's script from a CDN, by name and version.
window.fetch = async (address) => {
  const name = /^https:\/\/cdn\.jsdelivr\.net\/npm\/(\w+)@[^/]*\/dist\/index\.js$/.exec(address)?.[1];
  return new Response(await new Promise((done) => { const ask = new XMLHttpRequest(); ask.onload = () => done(ask.responseText); ask.open("GET", `nbextensions/${name}/index.js`); ask.send(); }));
};

function makeComm(id) {
  const waiting = [], wake = [];
  comms.set(id, (data) => { waiting.push({ data }); wake.splice(0).forEach((act) => act()); });
  async function* messages() { for (let n = 0; ; n++) { while (n >= waiting.length) await new Promise((act) => wake.push(act)); yield waiting[n]; } }
  return { send: async (data) => { sent.push({ comm: id, data }); }, close() {}, messages: { [Symbol.asyncIterator]: messages } };
}

let manager;
const environment = { getModelState: async (id) => states.get(id), openCommChannel: async () => makeComm("opened"), renderOutput: async () => {} };
const known = (state, comm) => ({ modelName: state._model_name, modelModule: state._model_module, modelModuleVersion: state._model_module_version, state, comm });
window.hear = (type, comm, content) => {
  if (type === "comm_open") states.set(comm, known(content.data.state, makeComm(comm)));
  else comms.get(comm)(content.data);
};
window.start = () => { manager = createWidgetManager(environment); };
window.show = (id) => manager.render(id, document.getElementById("cell"));
// Of a saved notebook, the state in its metadata; there is no kernel.
window.restore = (saved, id) => {
  const all = saved["application/vnd.jupyter.widget-state+json"].state;
  for (const [key, x] of Object.entries(all)) states.set(key, { modelName: x.model_name, modelModule: x.model_module, modelModuleVersion: x.model_module_version, state: x.state });
  window.start();
  return window.show(id);
};
