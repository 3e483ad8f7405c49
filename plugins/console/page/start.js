
// What happens first.

buildViews();
show(location.hash.slice(1));
key.listeners.push(learnModels, watch);
learnModels();
watch();
document.addEventListener("visibilitychange", () => { if (!document.hidden && current.shown) current.shown(); });
