// Sort by a heading, filter, say what scrolls; open the program that the address names.
document.querySelectorAll("table.sortable th").forEach(function (head) {
  var button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  head.textContent = "";
  head.appendChild(button);
  button.addEventListener("click", function () {
    var table = head.closest("table"), body = table.tBodies[0];
    var column = Array.prototype.indexOf.call(head.parentNode.children, head);
    var down = head.getAttribute("aria-sort") !== "descending";
    table.querySelectorAll("th").forEach(function (h) { h.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    var number = head.dataset.kind === "number";
    function key(row) {
      var cell = row.children[column];
      var text = cell.dataset.sort === undefined ? cell.textContent : cell.dataset.sort;
      return number ? parseFloat(text) || 0 : text;
    }
    Array.from(body.rows).sort(function (a, b) {
      var x = key(a), y = key(b), order = x < y ? -1 : x > y ? 1 : 0;
      return down === number ? -order : order;
    }).forEach(function (row) { body.appendChild(row); });
  });
});
function openTarget() {
  var target = location.hash && document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
}
window.addEventListener("hashchange", openTarget);
openTarget();
document.querySelectorAll(".filter").forEach(function (line) {
  var input = line.querySelector("input"), said = line.querySelector("[role=status]");
  var rows = Array.from(document.querySelectorAll("table.gemms tbody tr"));
  line.hidden = false;
  input.addEventListener("input", function () {
    var words = input.value.toLowerCase().split(/\s+/).filter(Boolean), shown = 0;
    rows.forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.includes(word); });
      shown += !row.hidden;
    });
    said.textContent = words.length ? shown + " of " + rows.length + " rows" : "";
    hints();
  });
});
function hints() {
  document.querySelectorAll(".scroll").forEach(function (box) {
    box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1);
  });
}
window.addEventListener("resize", hints);
hints();
