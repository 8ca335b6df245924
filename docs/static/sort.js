// A click on a heading of a table with the class "sortable" sorts its rows, numbers as numbers.
document.addEventListener("DOMContentLoaded", () => {
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = Number(text.replaceAll(",", "").replace("%", ""));
    return text === "" || Number.isNaN(number) ? text : number;
  };
  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number"
      ? one - other
      : String(one).localeCompare(String(other), "en", { numeric: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.append(...heading.querySelector("p").childNodes);
      heading.querySelector("p").append(button);
      button.addEventListener("click", () => {
        const falling = heading.ariaSort === "ascending";
        headings.forEach((each) => (each.ariaSort = null));
        heading.ariaSort = falling ? "descending" : "ascending";
        const rows = [...table.tBodies[0].rows];
        rows.sort((one, other) => compare(value(one, column), value(other, column)));
        table.tBodies[0].append(...(falling ? rows.reverse() : rows));
      });
    });
  }
});
