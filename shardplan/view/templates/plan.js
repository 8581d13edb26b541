// Reads memory off the chart under the pointer; everything else on the page works without scripts.
for (const root of document.querySelectorAll(".shardplan:not([data-ready])")) {
  root.dataset.ready = "yes";
  const chart = root.querySelector(".chart");
  const data = JSON.parse(root.querySelector("script.data").textContent);
  if (!chart || data.points.length < 2) continue;
  const cursor = chart.querySelector(".cursor"), reading = chart.querySelector(".reading");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const n = Math.round(share * (data.points.length - 1));
    const x = n / (data.points.length - 1);
    cursor.hidden = reading.hidden = false;
    cursor.style.left = `${100 * x}%`;
    reading.style.left = x < 0.5 ? `calc(${100 * x}% + 10px)` : "";
    reading.style.right = x < 0.5 ? "" : `calc(${100 * (1 - x)}% + 10px)`;
    reading.textContent = data.points[n].join("\n");
  });
  chart.addEventListener("pointerleave", () => { cursor.hidden = reading.hidden = true; });
}
