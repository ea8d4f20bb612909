// A page that is opened as a file may not start a worker. The search then runs in a hidden frame, with the interface of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // messages, until the frame has loaded the script
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const page = this.frame.contentDocument
      page.open()
      page.write("<body></body>")
      page.close()
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      script.src = url
      script.onload = () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach((data) => this.postMessage(data))
      }
      page.body.append(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else {
        const scope = this.frame.contentWindow
        scope.dispatchEvent(new scope.MessageEvent("message", { data }))
      }
    }

    terminate() {
      this.frame.remove()
    }
  }
}
