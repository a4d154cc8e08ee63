// A prediction that the reader chooses is marked at once, in words too; where it is right, the answer unfolds.
addEventListener("change", ({ target }) => {
  const group = target.closest?.(".quiz [role=radiogroup]");
  if (!group) return;
  const right = target.value === group.dataset.answer, question = group.closest(".quiz-question");
  for (const label of group.querySelectorAll("label")) label.classList.remove("quiz-right", "quiz-wrong");
  target.closest("label").classList.add(right ? "quiz-right" : "quiz-wrong");
  question.querySelector(".quiz-said").textContent = right ? "That is it." : "Not that one. Try another, or unfold the answer.";
  if (right) question.querySelector("details").open = true;
});
