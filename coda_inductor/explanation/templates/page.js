// Click a heading to sort its column; open the program that the address names.
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
