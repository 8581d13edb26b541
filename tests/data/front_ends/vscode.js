// A notebook's page in Visual Studio Code as far as a widget sees it: Microsoft's own widget manager, and a kernel that a test plays.

import { activate } from "./ipywidgets.js";

const signal = () => ({ connect() {}, disconnect() {} });
const targets = new Map(), comms = new Map();
window.sent = [];

function makeComm(targetName, commId) {
  const send = (data) => { sent.push({ comm: commId, data }); return { msg: { header: { msg_id: `${sent.length}` } }, done: Promise.resolve() }; };
  const found = { commId, targetName, isDisposed: false, send, open: () => send({}), close: () => send({}), dispose() {} };
  comms.set(commId, found);
  return found;
}

const kernel = {
  id: "kernel", name: "python3", clientId: "page", username: "", model: { id: "kernel", name: "python3" }, status: "idle", connectionStatus: "connected",
  isDisposed: false, handleComms: true, info: Promise.resolve({}), createComm: makeComm, hasComm: (id) => comms.has(id), removeCommTarget() {}, dispose() {},
  registerCommTarget: (name, act) => targets.set(name, act), requestCommInfo: async () => ({ content: { comms: {} } }),
};
for (const name of ["statusChanged", "connectionStatusChanged", "disposed", "iopubMessage", "unhandledMessage", "anyMessage", "pendingInput"]) kernel[name] = signal();

// The extension answers with the path of the widget's script in the Python environment's folder nbextensions.
const loader = {
  widgetsRegisteredInRequireJs: new Set(), successHandler() {}, errorHandler: (...what) => console.error(...what.map(String)),
  loadWidgetScript: async (name) => { requirejs.config({ paths: { [name]: `nbextensions/${name}/index` } }); },
};

activate();
window.vscIPyWidgets8.load();
let manager;
// As a connection to a kernel does, one message after the other.
let heard = Promise.resolve();
window.hear = (type, comm, content, metadata) => {
  heard = heard.then(() => type === "comm_open"
    ? targets.get("jupyter.widget")(makeComm("jupyter.widget", comm), { content: { comm_id: comm, ...content }, metadata, buffers: [] })
    : comms.get(comm).onMsg({ content, metadata, buffers: [] })).catch((error) => console.error(String(error)));
};
async function show(id) {
  await heard;
  const model = await manager.get_model(id), el = document.getElementById("cell"), view = await manager.create_view(model, { el });
  return manager.display_view({ model_id: id }, view, { node: el });
}
window.start = (saved) => { manager = new window.vscIPyWidgets.WidgetManager(saved ? { ...kernel, id: "", clientId: "" } : kernel, document.getElementById("cell"), loader, () => {}, saved); };
window.show = show;
// Of a saved notebook, the state in its metadata; there is no kernel.
window.restore = async (saved, id) => {
  window.start(saved);
  await manager.restoreWidgets({ metadata: { get: () => saved } , getMetadata: () => saved }, { loadKernel: false, loadNotebook: true });
  (await manager.get_model(id)).comm_live = false;
  return show(id);
};
